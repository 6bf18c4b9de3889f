"""A champion, and a stream of challengers: proposals, whoever makes them, become verdicts.

Its door: `referee` (challenge), `ledger` (what was tried, and what came of it), `page` (that, as it is shown).
"""
