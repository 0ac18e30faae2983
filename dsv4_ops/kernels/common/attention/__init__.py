"""Parts of attention that several ops share: splits, their combine, and the mainloop."""
