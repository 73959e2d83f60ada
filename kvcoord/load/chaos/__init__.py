"""A replay while processes are killed, stopped and cut off at random: the promises, checked from the outside."""
