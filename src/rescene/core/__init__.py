"""What every layer may use: records of a run's files, method styles, recipe keys."""
