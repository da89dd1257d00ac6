"""Numbers for people: 10^9-based bytes, grouped counts."""

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def gigabytes(num_bytes: int) -> str:
    """26.4 MB, 4.29 GB: three digits, at least one after the point, decimal units."""
    size = abs(num_bytes)
    for scale, unit in _UNITS:
        if size >= scale:
            value = num_bytes / scale
            return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"
    return f"{num_bytes} B"
