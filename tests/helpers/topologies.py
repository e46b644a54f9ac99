"""Hand-written topologies of hosts and switches, in the forms of NCCL, nvidia-smi and Slurm."""


def nccl_xml(
    *, gpus=8, sm=90, links=18, target="switch", speed="32.0 GT/s PCIe", width=16, nics=8, mbits=400000, more=0
):
    """Return a topology as NCCL dumps it; `target`: what NVLinks lead to; `more`: slower cards besides."""
    lines = ['<system version="1">']
    per_socket = max(1, gpus // 2)
    for socket in range(max(1, gpus // per_socket)):
        lines.append(f'  <cpu numaid="{socket}" affinity="ffff" arch="x86_64" vendor="GenuineIntel" host_hash="0x1">')
        for gpu in range(socket * per_socket, (socket + 1) * per_socket):
            link = f'link_speed="{speed}" link_width="{width}"'
            lines.append(f'    <pci busid="0000:{gpu:02x}:00.0" class="0x060400" {link}>')
            lines.append(f'      <pci busid="0000:{gpu:02x}:01.0" class="0x030200" {link}>')
            lines.append(f'        <gpu dev="{gpu}" sm="{sm}" rank="{gpu}" gdr="1">')
            lines += _nvlinks(gpu, gpus, links, target)
            lines += ["        </gpu>", "      </pci>"]
            if gpu < nics:
                lines += _nic(gpu, f"mlx5_{gpu}", mbits, link)
            lines.append("    </pci>")
        lines.append("  </cpu>")
    for card in range(more):
        lines += ['<cpu numaid="9">', *_nic(90 + card, f"eth{card}", 25000, link), "</cpu>"]
    return "\n".join([*lines, "</system>"]) + "\n"


def _nvlinks(gpu, gpus, links, target):
    if target == "switch":
        return [
            f'          <nvlink target="0000:f{i}:00.0" count="{n}" tclass="0x068000"/>'
            for i, n in enumerate(_split(links))
        ]
    if target == "none":
        return []
    pairs = {(a, b): n for (a, b), n in target.items()}
    found = []
    for (a, b), n in pairs.items():
        for end, other in ((a, b), (b, a)):
            if end == gpu:
                found.append(f'          <nvlink target="0000:{other:02x}:01.0" count="{n}" tclass="0x030200"/>')
    return found


def _split(links):
    """Return a GPU's NVLinks by switch: 5, 5, 4 and 4 of eighteen."""
    return [links // 4 + (i < links % 4) for i in range(4)]


def _nic(number, name, mbits, link):
    return [
        f'      <pci busid="0000:a{number % 16:x}:{number:02x}.0" class="0x020000" {link}>',
        f'        <nic><net name="{name}" dev="{number}" speed="{mbits}" latency="0.0" gdr="1"/></nic>',
        "      </pci>",
    ]


def smi_matrix(cells, nics=0):
    """Return the output of `nvidia-smi topo -m` for connections by pair of GPUs, or one for all pairs."""
    count = 8 if isinstance(cells, str) else 1 + max(b for _, b in cells)
    names = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for a in range(count):
        row = []
        for b in range(count):
            cell = cells if isinstance(cells, str) else cells.get((min(a, b), max(a, b)), "SYS")
            row.append("X" if a == b else cell)
        lines.append("\t".join([f"GPU{a}", *row, *["PIX"] * nics, "0-47", "0"]))
    legend = [f"  NIC{i}: mlx5_{i}" for i in range(nics)]
    return "\n".join([*lines, "", "Legend:", "  X    = Self", *legend]) + "\n"
