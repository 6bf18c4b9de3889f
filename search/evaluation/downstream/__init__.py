"""Tasks beyond the language model's own loss: text scored and continued, by whatever asks for it."""
