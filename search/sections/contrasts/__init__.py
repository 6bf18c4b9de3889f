"""`report.contrasts`: differences of two variants neither of which is the baseline."""
