"""Predicts memory and step time of sharding plans on unequal clusters."""
