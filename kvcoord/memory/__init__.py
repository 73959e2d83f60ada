"""Who owns bytes: the slots of each pool, reservations over several pools, and the memory that backs them."""
