"""Every public method of the SDK, held to its meaning. A package, so that its stack ends here."""
