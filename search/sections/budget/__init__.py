"""`budget:`: what a study may spend, and has spent."""
