"""The lab: a scenario's cluster, emulated on one Linux machine with namespaces, shaped links and slowed-down cores."""
