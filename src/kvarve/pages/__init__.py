"""What a page is: its pools and their sizes, its keys and names, and where a prompt may resume (`boundaries`)."""
