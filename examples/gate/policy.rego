# What the team asks of a plan, for conftest:
#   prepkit show plan.json --json | conftest test -p policy.rego -
package main

import rego.v1

engine := input.plan.config.engine.kind

env := input.plan.facts.env

deny contains sprintf("%d processes are more than the 512 that we pay for", [env.world_size]) if env.world_size > 512

deny contains "gradients are not clipped: write clip = { kind = \"ClipNorm\", max_norm = 1.0 }" if {
	input.plan.config.intent == "training"
	input.plan.config.clip == null
}

warn contains sprintf("%s is not what we know best, which is FSDP2", [engine]) if engine != "FSDP2"

warn contains sprintf("an error of %s was accepted", [finding.rule]) if some finding in input.plan.overridden
