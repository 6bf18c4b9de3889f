"""What a study leaves on paper: its figures by matplotlib, its tables, and a page that holds all of it."""
