"""Tools that know nothing of training: units, numbers, errors, formulas, files written whole."""
