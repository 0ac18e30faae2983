"""Parts of attention that several families share: splits, their combine, and the mainloop."""
