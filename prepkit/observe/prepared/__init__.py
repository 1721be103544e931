"""What has been prepared, by whomever, as facts: looks only, and changes nothing."""
