"""Files of buffers: what is read, what is refused, and what is written."""

from pathlib import Path

import pytest

from planner.graphs.addresses import Buffer, Offsets
from planner.graphs.errors import FormatError
from planner.graphs.io.buffers import read_buffers, write_offsets


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "id,lower,upper,size\na,0,3,4\nb,2,5,6\n",
        "size,upper,id,lower\r\n4,3,a,0\r\n6,5,b,2\r\n",
        '\ufeffbuffer_id, begin, upper, size, note\na,0,3,4,x\n\nb,2,5,6,"y,z"',
        "id,start,end,size\na,0,2,4\nb,2,4,6\n",
        "id,lower,upper,size,alignment,pool,gaps,offset\na,0,3,4,1,device,,7\nb,2,5,6,1,device,,1\n",
    ],
)
def test_columns_may_have_any_order_and_the_published_names(text: str, tmp_path: Path) -> None:
    table = read_buffers(written(tmp_path, text))
    assert table.buffers == (Buffer("a", 0, 3, 4), Buffer("b", 2, 5, 6))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("id,lower,size\na,0,4\n", "there is no column 'upper'"),
        ("a,0,3,4\n", "there is no column 'id'"),
        ("id,lower,begin,upper,size\n", "two columns 'lower'"),
        ("id,lower,upper,size\na,3,3,4\n", r"line 2: buffer 'a' has the lifetime \[3, 3\)"),
        ("id,lower,upper,size\na,4,3,4\n", "lower must be below upper"),
        ("id,lower,upper,size\na,0,3,0\n", "has a size of 0"),
        ("id,lower,upper,size\na,0,3,-4\n", "has a size of -4"),
        ("id,lower,upper,size\na,0,3,nan\n", "line 2: size is 'nan': must be a whole number"),
        ("id,lower,upper,size\na,0,3,4.5\n", "must be a whole number"),
        ("id,lower,upper,size\na,0,3,\n", "size is ''"),
        ("id,lower,upper,size\na,0,3,1e9\n", "must be a whole number"),
        ("id,lower,upper,size\na,0,3,99999999999999999999999\n", r"must be at most 2\^62"),
        ("id,lower,upper,size\na,0,3,4\nb,2,5", "line 3 has 3 fields, and the header 4: the file may be cut short"),
        ("id,lower,upper,size\na,0,3,4\na,2,5,6\n", "line 3: the id 'a' is also that of line 2"),
        ("id,lower,upper,size\n,0,3,4\n", "line 2 has no id"),
        ('id,lower,upper,size\n"a,0,3,4\n', "not CSV"),
        ("id,lower,upper,size,alignment\na,0,3,4,0\n", "has an alignment of 0"),
        ("id,lower,upper,size,gaps\na,0,3,4,1-2\n", "has gaps"),
    ],
)
def test_defective_buffer_files_raise(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=said):
        read_buffers(written(tmp_path, text))


def test_offsets_are_the_last_column_and_the_others_stay(tmp_path: Path) -> None:
    table = read_buffers(written(tmp_path, 'offset,size,note,id,lower,upper\n9,4,"x,y",a,0,3\n9,6,,b,2,5\n'))
    write_offsets(tmp_path / "out.csv", table, Offsets(table.buffers, (6, 0)))
    text = (tmp_path / "out.csv").read_text()
    assert text == 'size,note,id,lower,upper,offset\n4,"x,y",a,0,3,6\n6,,b,2,5,0\n'
    assert read_buffers(tmp_path / "out.csv").buffers == table.buffers
