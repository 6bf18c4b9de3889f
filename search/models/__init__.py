"""One model by its name: shown, compared, imported, exported."""
