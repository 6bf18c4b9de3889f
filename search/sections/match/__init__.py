"""`match:`: what is made equal, and the fields that are solved for it."""
