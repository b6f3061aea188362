"""FTPipeHD: asynchronous pipelines that adapt to their devices and survive losing them."""
