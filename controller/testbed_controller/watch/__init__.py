"""A web page on loopback that follows an active run and can inject faults."""
