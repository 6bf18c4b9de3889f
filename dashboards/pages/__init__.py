"""The pages, in the order of the tabs of a study: a module for each, with `register(app, library)`."""
