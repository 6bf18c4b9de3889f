"""What `archlab bench --gpu` finds out about a card, in one report to keep or to send."""
