"""`search:` and `space:`: proposals in place of variants, their scores and their front."""
