"""Graph structures and the cache that holds them; knows indices only, no layer."""
