"""From spec, hosts and facts to a `LaunchPlan`. Pure: no process, no file, no clock."""
