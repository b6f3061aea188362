"""What the methods that train asynchronously share."""
