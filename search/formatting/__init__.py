"""What anything shown is made of: numbers with units, settings in words, cells and blocks of tables, filters."""
