"""What is removed from text before it is split: duplicates, personal data, text of low quality."""
