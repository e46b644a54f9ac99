"""The lab: a scenario's cluster, emulated on one Linux machine with namespaces, shaped wires and slowed-down cores."""
