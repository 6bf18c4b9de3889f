"""Pure functions of numbers: intervals, corrections, correlations, power laws, fronts."""
