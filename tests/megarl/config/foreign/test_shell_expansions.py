"""Values in the words of a script are those of bash, in the forms that scripts have, or are said to be unknown."""

import subprocess
from pathlib import Path

import pytest

from megarl.config.foreign.shell_script import read_script

ENVIRONMENT = {"HOME": "/root", "E": "env"}
KNOWN = [
    "X=\nshow ${X-a} ${X:-b} ${X+c} ${X:+d} ${NO-e} ${NO+f} ${X=g} ${X:=h} $X",
    'A=(--x "a b" c)\nshow ${A[@]+"${A[@]}"} z',
    'A=(--x "a b" c)\nshow "${A[@]+"${A[@]}"}" ${A[@]:+yes} "${A[@]:-no}"',
    'A=()\nshow ${A[@]+"${A[@]}"} "${A[@]+"${A[@]}"}" ${A[@]:+yes} "${A[@]:-no}" ${A[@]:-a b} "${A[*]}"',
    'A=(a "b c")\nshow "${A[*]}" ${A[*]} x"${A[*]}"y',
    'A=a\nshow ${A[@]} "${A[*]}"',
    "N=-7\nshow $((N / 2)) $((N % 3)) $((7 / -2)) $((7 % -3)) $((-N)) $[N + 1]",
    """show $'a b' "$"'x' $"a $E" $'it' """,
    """X=$(echo "a)b" 'c(' \\))\nshow 1 "c)" """,
    "X=$(echo 1 # it's )\n)\nX=$(cat <<EOF\nit's (a\nEOF\n)\nshow 1",
    'X=$(case a in a) echo 1;; *) echo ")";; esac)\nX=$( (echo a); echo b )\nX=$((echo a) | cat)\nshow 2',
    "show ${X:-'}'} ${X:-\"}\"} ${X:-\\}} \"${X:-\\}}\" 'x'",
    "Y=${X//\\'/a}${X%\\}*}${X#*\\\"}\nshow 3",
    "Y=\"${X//'\"'/}\"\nshow 3 ''",
    'show "${X:-[\'a\',\'b\']}" "${X:-a \'b  c\'}" "${X:-"a  b"}" "${X:-a\\"b}" ${X:-\'a  b\'}',
    'show ${X:-a;b} ${X:-a>b} ${X:-(a)} ${X:-a&b|c} ${X:-"a;b" c} ${X:-"a"#b}',
    'show ~/a ~ x=~/b a.b=~/c --y=~/d "~/e" \\~ z~\nX=~/x\nexport Y=~\nA=(~/z)\nshow $X $Y ${A[@]}',
    'X=${X:-~/a}\nshow $X ${NO:-~} ${NO:-~/b c} ${NO:-~x} "${NO:-~/d}"',
    'X=${NO:-a  b"c  d"}\nshow "$X" ${NO:-a  b"c  d"}',
    'show a "${@:2}" "${@}" "$*" $*',
    "show \"{a,b}\" '{1..3}' {a} {} {a\\,b} \\{a,b\\} {a,b ${X:-{a}b}",
    "cat <<EOF > /dev/null; X=2\nX=3\nEOF\nshow $X",
    "cat <<A <<B > /dev/null\nX=1\nB\nA\nX=2\nB\nshow ${X:-none}",
    "show 1 `# a comment` 2 $(# one more\n) 3",
    'X=1\neval "X=2"\nshow $X',
    "A=\"--x 'a b'\"\neval show $A --y '\"c  d\"' \\$E",
    'eval "show \\\n --a 1 \\\n --b 2"',
    'D=$(dirname "$(dirname "$(realpath "$0")")")\nshow $D $(dirname $(readlink -f $0))',
    'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../x" &> /dev/null && pwd -P)"\nshow $D',
    'D=$(dirname $(realpath $0))\nE="$(cd -- "${D}/../x" &>/dev/null && pwd)"\n'
    'show $E $(dirname "$E") $(cd $D/.. ; pwd)',
    'set -eo pipefail\nset +e -x\nset --\nshow $@ ${1:-a} "$@"',
]
UNKNOWN = [
    'set -- a b\nshow $1 "$@" ${2:-x}',
    'run() { show "$@" ${1:-x}; }\nrun a b',
    "function run {\n  show ${1-x}\n}\nrun a",
    "run() ( show $* )\nrun a",
    "N=$((${1:-2} * 8))\nM=$(( $1 * 8 ))\nshow $M",
    "N=010\nshow $((N + 1))",
    "show $'a\\tb'",
    'IFS=,\nA=(a b)\nshow "${A[*]}"',
    'show {a,b} x{1..3} a={c:1,d:2} {"a",b}',
    'declare -A A=([a]="1 2")\nshow "${A[@]}"',
    "A=([0]=x [1]=y)\nshow ${A[@]}",
    'D=$(basename "$(dirname "$0")")\nshow $D',
    "show $(ls $(dirname $0)/script.sh)",
    'D=$(cd "$(dirname $0)" && cd .. && pwd)\nF=$(dirname "$NO/a")\nshow $D $F',
    "[ -f /etc/passwd ] && D=1\nshow ${D:+--debug}",
    'A="\'$(echo c d)\'"\neval "show $A"',
]


def words_of_bash(file: Path) -> list[list[str]]:
    """The words of each call of `show`, in the script that is run."""
    show = file.parent / "show"
    show.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\1' >> \"${0%/*}/out\"\n")
    show.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{file.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "--norc", file], env=environment, capture_output=True)
    calls = (file.parent / "out").read_text().split("\1\0")[:-1]
    return [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize(
    ("text", "is_known"), [*((each, True) for each in KNOWN), *((each, False) for each in UNKNOWN)]
)
def test_values_are_those_of_bash(tmp_path: Path, text: str, is_known: bool) -> None:
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "a" / "b").mkdir()
    file = tmp_path / "a" / "b" / "script.sh"
    file.write_text(f"{text}\n")
    calls = [each[1:] for each in read_script(file, ENVIRONMENT).commands if each[0].text == "show"]
    expected = words_of_bash(file)
    assert len(calls) == len(expected)
    if is_known:
        assert [[word.known() for word in call] for call in calls] == expected
    else:
        assert all(word.unknown for call in calls for word in call), calls
