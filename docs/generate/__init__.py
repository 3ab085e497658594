"""Pages of the site that are made from the program itself: error codes, commands, keys, methods, reproduction status."""
