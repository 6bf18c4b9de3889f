"""What a primitive is made of and must offer: families, build context, layers, what is watched and kept."""
