"""Text as tokens: bytes, tokenizers trained on the corpus, pretrained ones."""
