"""Where rows lie in memory."""
