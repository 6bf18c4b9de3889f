"""`ladder:`: several sizes and lengths of each variant, muP between them, and the laws fitted over them."""
