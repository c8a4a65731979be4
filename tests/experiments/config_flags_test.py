import dataclasses
import sys

from absl import flags
from absl.testing import absltest, parameterized

from experiments import config_flags, train


class ConfigFlagsTest(parameterized.TestCase):
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Config:
    """Settings.

    Attributes:
      name: A name.
      count: A count, described
        on two lines.
      rate: A rate.
      is_on: A switch.
      words: Words.
      numbers: Numbers.
      counts: Counts.

    Example:
      name: no description.
    """

    name: str = "a"
    count: int = 1
    rate: float = 0.5
    is_on: bool = False
    words: tuple[str, ...] = ("x", "y")
    numbers: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

  def _parse(self, *arguments):
    values = flags.FlagValues()
    config_flags.define(self.Config, values)
    values(["program", *arguments])
    return config_flags.from_flags(self.Config, values)

  def test_no_flags_give_the_defaults(self):
    self.assertEqual(self._parse(), self.Config())

  @parameterized.named_parameters(
    ("text", "--name=b", {"name": "b"}),
    ("integer", "--count=7", {"count": 7}),
    ("number", "--rate=1e-3", {"rate": 1e-3}),
    ("switch", "--is_on", {"is_on": True}),
    ("words", "--words=p,q+r", {"words": ("p", "q+r")}),
    ("numbers", "--numbers=1,2.5", {"numbers": (1.0, 2.5)}),
    ("counts", "--counts=1,2", {"counts": (1, 2)}),
  )
  def test_flag_sets_its_field(self, argument, expected):
    self.assertEqual(self._parse(argument), self.Config(**expected))

  def test_flags_are_those_of_the_program_that_defines_them(self):
    """So that --help shows them."""
    values = flags.FlagValues()
    config_flags.define(self.Config, values)
    own = values.get_key_flags_for_module(sys.argv[0])
    here = values.get_key_flags_for_module(__name__)
    names = {flag.name for flag in [*own, *here]}
    self.assertContainsSubset({"name", "rate", "counts"}, names)

  def test_help_is_the_docstrings(self):
    values = flags.FlagValues()
    config_flags.define(self.Config, values)
    self.assertEqual(values["count"].help, "A count, described on two lines.")
    self.assertEqual(values["name"].help, "A name.")

  def test_unknown_flag_fails(self):
    with self.assertRaises(flags.UnrecognizedFlagError):
      self._parse("--colour=red")

  def test_number_that_is_none_names_its_flag(self):
    with self.assertRaisesRegex(ValueError, "--numbers must be .* got '1,b'"):
      self._parse("--numbers=1,b")

  def test_undescribed_field_is_refused(self):
    @dataclasses.dataclass
    class Config:
      """Settings.

      Attributes:
        name: A name.
      """

      name: str = ""
      other: str = ""

    with self.assertRaisesRegex(ValueError, "Config.other must be described"):
      config_flags.define(Config, flags.FlagValues())

  def test_other_type_is_refused(self):
    @dataclasses.dataclass
    class Config:
      """Settings.

      Attributes:
        table: A table.
      """

      table: dict[str, int] = dataclasses.field(default_factory=dict)

    with self.assertRaisesRegex(ValueError, "Config.table must be a str"):
      config_flags.define(Config, flags.FlagValues())

  def test_import_defines_no_flags(self):
    self.assertNotIn("dataset", flags.FLAGS)

  def test_every_setting_of_the_main_program_is_a_flag(self):
    values = flags.FlagValues()
    train.define_flags(values)
    fields = {field.name for field in dataclasses.fields(train.Config)}
    self.assertLessEqual(fields | {"list_arms"}, set(values))


if __name__ == "__main__":
  absltest.main()
