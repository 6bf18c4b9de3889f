"""`screen:`: all variants under a cheap recipe first, and which go on."""
