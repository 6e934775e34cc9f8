"""States of averages: their layout, and files that are written completely or not at all."""
