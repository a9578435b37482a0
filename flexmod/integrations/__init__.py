"""flexmod inside other libraries; each module imports its library when it is used."""
