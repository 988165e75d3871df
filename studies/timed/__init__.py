"""Time to accuracy: selectors on devices of unequal speed, which is tied to the data or not."""
