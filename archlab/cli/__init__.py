"""The command line: a file for each group of verbs. `main.main` is the program `archlab`."""
