"""Shell scripts that are followed start the same commands as bash does, where nothing is open."""

import random
import re
import shutil
import subprocess

import pytest

from gssim.interop.shell import follow
from gssim.interop.shell_syntax import MARKS, written

START = r"""start() { printf '%s\037' "$@"; printf '%s\036' "$#"; }
"""

SCRIPTS = {
    "quotations": """A=two; start one "$A  words" '$A' "a 'b' \\"c\\" \\$A" $A"joined"${A}x ""  a\\ b # comment""",
    "splitting": """A=" x  y "; start $A "$A" [$A] z$A; B=""; start [$B]$A$B x$B "$B"$B $B""",
    "arrays": """A=(1 "2 3" --x=4 # comment
        5); A+=(6); start "${A[@]}" ${A[1]} ${A[0]} "${A[*]}" x"${A[@]}"y""",
    "empty arrays": """A=(); start a "${A[@]}" b ${A[@]} c "$NONE_SET"x""",
    "adding": """A=one; A+=" two"; A="$A three"; start $A""",
    "defaults": """B=""; start "${A:-1}" "${A-2}" "${B:-3}" "${B-4}" "${C:=5}" "$C" "${C:+6}" "${D:+7}" ${E:-a b}""",
    "cut": """A=Dir/File.TXT; start "${A##*/}" "${A%.*}" "${A#*/}" "${A%%/*}" "${A,,}" "${A^^}" "${A#none}" """,
    "arithmetic": """A=7; B=2; start $((A / B)) $(( $A % B )) $((-A/B)) $((A > 2 && B == 2)) $((A*(B+1)))""",
    "echo": """A=$(echo -n x y); B=`echo z`; start "$A" $A $B""",
    "if": """A=3; if [ $A -eq 2 ]; then start two; elif [[ $A == 3 && -n "$A" ]]; then start three; else start x; fi""",
    "tests": """A=ab; [ -z "$A" ] && start 1; [ -n "$A" ] && start 2; [[ $A == a* ]] && start 3
        [[ $A == "a*" ]] && start 4; [[ ! ( $A == x || $A == ab ) ]] || start 7; ! false && start 8
        [ "$A" != b ] || start 5; [ 3 -lt 4 -a 4 -le 4 ] && start 6""",
    "chains": """true && false || start 1; false && start 2; true || start 3; false || true && start 4""",
    "case": """for A in x yy z7 other; do case $A in x|w) start 1;; (y*) start 2
        ;; z[0-9]) start 3;; *) start 4; esac; done""",
    "loops": """for i in 1 2 "3 4"; do start $i; done; for w in a b c; do [ $w = b ] && break; start $w; done
        for ((i = 0; i < 1; i++)); do start once; done; while false; do start never; done
        until true; do start no; done""",
    "functions": """f() { local A=$1; start "$#" "$A" "$@"; return 0; start never; }
        function g { f in "$1"; }; f a "b c"; g d""",
    "positional": """set -- a "b c"; start "$@" $# $1; shift; start "$1" """,
    "documents": """start before
cat > /dev/null <<EOF
start not this --x $A
EOF
A=1
read -r -d '' B <<'EOF' || true
$A --y
EOF
cat <<-EOF > /dev/null
	start nor this
	EOF
start $B after""",
    "eval": """A=1; C='start $A --b "c d"'; eval $C; eval "$C"; D="start x y"; $D""",
    "continued": """start a \\
    b "c \\
d" \\
    e
A="x \\
  y"; start $A""",
    "groups": """{ start 1; start 2; }; (start 3; start 4) | cat; start 5 2>&1 | cat; start 6 > /dev/stdout""",
    "declared": """export A=1 B="two words"; declare -a C=(x y); readonly D=$A; start $A "$B" "${C[@]}" $D""",
    "leaving": """f() { if [ $1 = a ]; then A=1; return; fi
        for i in 1 2; do [ $i = 2 ] && return; start in $i; done; A=2; }
        f a; start $A; f b; start $A; for i in 1 2 3; do [ $i = 2 ] && continue; start $i; done
        for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break; start $i $j; done; done; start end""",
    "exits": """start 1; exit 0; start 2""",
}
BASH = shutil.which("bash")


def words_of(text):
    """Return the words that each `start` of a script gets by bash, and as it is followed."""
    ended = subprocess.run([BASH, "-c", START + text], capture_output=True, text=True, timeout=10, check=False)
    by_bash = []
    for part in ended.stdout.split("\036")[:-1]:
        *words, count = part.split("\037")
        by_bash.append(words[: int(count)])
    followed = [list(each.words[1:]) for each in follow(text, file="x").commands if each.words[0] == "start"]
    return by_bash, followed


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_start_what_bash_does(name):
    by_bash, followed = words_of(SCRIPTS[name])
    assert by_bash
    if name == "defaults":  # what is set nowhere is open, not empty
        followed = [["" if word == written(word) and "\0" in word else word for word in words] for words in followed]
    assert [[written(word).replace("$NONE_SET", "") for word in words] for words in followed] == by_bash


def random_script(draw, depth=0, leaves=()):
    """Return a random script of assignments, tests, loops and starts; what loops add could grow without end."""
    name = draw.choice("ABC")
    kind = draw.choice(
        ["assign", "array", "start", *([] if leaves else ["add"])]
        + (["if", "for", "case", "function"] if depth < 3 else [])
    )
    if kind == "assign":
        value = draw.choice(["1", "x y", "", "$A", "${B:-d}", "$((2 * 3))"])
        return f'{name}="{value}"'
    if kind == "add":
        value = draw.choice([" z", "0", " --o=$C"])
        return f'{name}+="{value}"'
    if kind == "array":
        sign, value = draw.choice(["=", "=" if leaves else "+="]), draw.choice(["u v", "$A", "'w w'"])
        return f'L{sign}("${name}" {value})'
    if kind == "start":
        value = draw.choice(["--a", "b\\ c", "${L[0]}"])
        return f'start $A "$B" $C "${{L[@]}}" {value}'
    leaves += {"for": ("break", "continue"), "function": ("return",)}.get(kind, ())
    first, second = (random_script(draw, depth + 1, leaves) for _ in range(2))
    if leaves and draw.random() < 0.4:
        first = f'[ "$B" = 1 ] && {draw.choice(leaves)}; {first}'
    if kind == "if":
        test = draw.choice(['[ "$A" = 1 ]', "[[ $B == x* ]]", '[ -z "$C" ]', '[ "$B" != "" ]', "false"])
        return f"if {test}; then {first}; else\n{second}\nfi"
    if kind == "for":
        return f"for {name} in 1 'a b' $B; do {first}; done"
    if kind == "case":
        return f'case "$A" in 1|x*) {first};; *) {second} ;; esac'
    return f'f{depth}() {{ {first}\n}}; f{depth} q "$A"'


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_random_scripts_start_what_bash_does():
    draw = random.Random(0)
    started = 0
    for _ in range(150):
        text = 'A=1; B=""; C=2; L=()\n' + "\n".join(random_script(draw) for _ in range(8))
        by_bash, followed = words_of(text)
        assert followed == by_bash, text
        started += len(by_bash)
    assert started > 300


def pattern_of(text, script, depth=0):
    """Return an expression for the texts that a text with marks may be."""
    found, at = "", 0
    for match in MARKS.finditer(text):
        branch = script.branches.get(match[1])
        choices = [pattern_of(each or "", script, depth + 1) for each in branch.alternatives] if branch else [".*"]
        found += re.escape(text[at : match.start()]) + f"(?:{'|'.join(choices)})"
        at = match.end()
    return found + re.escape(text[at:])


def test_what_is_open_holds_for_every_value():
    """Commands that random scripts start for any values of $X and $Y are among those that `follow` returns."""
    draw = random.Random(2)
    opened = 0
    for _ in range(120):
        text = 'A=1; B=""; C=2; L=()\n' + "\n".join(random_script(draw) for _ in range(draw.randint(3, 7)))
        for test in ('[ "$A" = 1 ]', 'case "$A" in'):
            others = {"[": ['[ "$X" = 1 ]', "[ $X = 2 ]", "[[ $Y == 1 ]]"], "c": ["case $X in"]}[test[0]]
            text = re.sub(re.escape(test), lambda match, others=others: draw.choice([match[0], *others]), text)
        script = follow(text, file="x")
        patterns = [
            re.compile(r"\s*".join(pattern_of(word, script) for word in each.words)) for each in script.commands
        ]
        opened += bool(script.branches)
        for x, y in ((x, y) for x in "123" for y in "12"):
            for command in follow(text, file="x", given={"X": x, "Y": y}).commands:
                joined = " ".join(" ".join(command.words).split())
                texts = (joined, joined.replace(" ", ""), " ".join(command.words))
                assert any(pattern.fullmatch(each) for pattern in patterns for each in texts), (x, y, text)
    assert opened > 40


def test_what_is_open_is_followed_on_both_sides():
    script = follow(
        "if [ $A = 1 ]; then B=2; O='-x --y'; else B=3; O='-x'; fi\n[ $C = 1 ] && D=4\nstart $B $O $D $E", file="x"
    )
    assert [written(word) for word in script.commands[0].words] == ["start", "$B", "-x", "$O", "$D", "$E"]
    kinds = {label.partition("\1")[0]: branch.alternatives for label, branch in script.branches.items()}
    assert kinds == {"B": ("2", "3"), "O": ("--y", ""), "D": ("4", None)}
    assert next(each.variable for label, each in script.branches.items() if label.startswith("D")) == "C"


@pytest.mark.parametrize(
    ("text", "alternatives"),
    [
        ("f() { if [ $X = 1 ]; then A=1; return; fi; A=2; }; f", {"1", "2"}),
        ("for i in 1 2; do if [ $X = 1 ]; then A=1; continue; fi; A=2; done", {"1", "2"}),
        ("A=0; for i in 1; do [ $X = 1 ] && break; A=2; done", {"0", "2"}),
        ("A=0; while true; do case $X in 1) A=1; break;; 2) exit;; *) A=2; break;; esac; A=3; done", {"1", "2"}),
        ("f() { for i in 1 2; do if [ $X = 1 ]; then A=1; return; fi; done; A=2; }; f", {"1", "2"}),
    ],
)
def test_branches_that_leave_are_merged(text, alternatives):
    script = follow(f"{text}\nstart $A", file="x")
    values = {script.commands[0].words[1]}
    while open_values := {value for value in values if "\0" in value}:
        for value in open_values:
            values = (values - {value}) | set(script.branches[value.strip("\0")].alternatives)
    assert values == alternatives


def test_variables_of_other_branches_are_empty():
    text = 'if [ "$#" = 0 ]; then A=1; else B=2; fi\nC=$C:x\nfor i in; do D=1; done\n'
    text += "while [ $# -gt 0 ]; do E=$1; shift; done"
    script = follow("f() { " + text + "\n}; f; start $A [$B] $C [$D] $E ${B-unset}", file="x")
    assert [written(word) for word in script.commands[0].words] == ["start", "1", "[]", "$C:x", "[]", "$E", "unset"]


def test_given_variables_stay():
    script = follow(
        'A=1\nB=${2:-x}\n[ $# -lt 2 ] && { echo usage; exit 1; }\nstart $A "$1" $B',
        file="x",
        given={"A": "9", "1": "a b"},
    )
    assert script.commands[0].words == ("start", "9", "a b", "x")


def test_branches_that_exit_before_they_start_anything_are_not_taken():
    text = 'if [ -z "$DATA" ]; then echo needs DATA; exit 1; fi\n[ -f x ] || exit 1\n'
    text += "case $1 in -h) usage; exit;; esac\nstart $DATA"
    script = follow(text, file="x")
    assert [written(word) for word in script.commands[-1].words] == ["start", "$DATA"]
