"""What a threshold costs in quality and gains in bytes and time: paired trainings of a study's variants."""
