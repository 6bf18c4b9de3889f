"""Parameters from and to files, and the layouts of other libraries."""
