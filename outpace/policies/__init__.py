"""How much to draft; the controller behind `auto`."""
