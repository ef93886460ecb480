"""Act: exit rules, their replay and cost, decoding, edits and replacement."""
