"""Several engines of one model behind one front end: ``--data-parallel-size``."""
