"""Files of plans, written by hand."""


def file_text(body="torch_fused_linear plans 1\ngpu GPU A\ncublaslt 130100\n"):
    hash = 0xCBF29CE484222325  # FNV-1a
    for byte in body.encode():
        hash = (hash ^ byte) * 0x100000001B3 % 2**64
    return f"{body}checksum {hash:x}\n"
