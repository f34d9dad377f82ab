"""Topics: their registry, partitions, layouts, segments and offsets."""
