"""What a calibration found: what each choice is worth, and how loud each recipe is."""
