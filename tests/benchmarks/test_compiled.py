from compiled import Sent, collectives

HLO = """
HloModule step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (f32[8]{0}, f32[4,16]{1,0}) all-reduce-start(%a, %b), to_apply=%sum
  ROOT %t = (s32[], f32[8]) tuple(%i, %r)
}

ENTRY %main (x: f32[64]) -> f32[] {
  %all-gather.1 = bf16[64,32]{1,0} all-gather(%x), channel_id=1
  %add = f32[9999]{0} add(%all-reduce.5, %all-gather.1)
  %w = (s32[], f32[8]) while(%t), condition=%c, body=%body, """
HLO += """backend_config={"known_trip_count":{"n":"24"}}
  ROOT %s = f32[]{:T(128)} all-reduce(%c), to_apply=%sum
}
"""


def test_collectives_are_found_in_hlo_and_counted_in_loops():
    assert sorted(collectives(HLO)) == [
        Sent("all-gather", 1, 4096, 2048),
        Sent("all-reduce", 1, 4, 1),
        Sent("all-reduce", 24, 288, 64),
    ]


def test_program_without_collectives_has_none():
    assert collectives(HLO.replace("all-", "some-")) == []
