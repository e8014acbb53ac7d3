{{/* "true" where the release is enabled. Every template asks this first, because it also completes .Values: what is missing
or null gets its default, and each value one form. */}}
{{- define "lorafleet.isEnabled" -}}
{{- include "lorafleet.completeValues" . -}}
{{- if .Values.enabled }}true{{ end -}}
{{- end }}

{{/* Changes .Values; a second call changes nothing.

Helm takes a default away where a file says null (a section with every line commented out), and a release that is upgraded
with --reuse-values has none of a new chart's. files/defaults.json has those of values.yaml, as paths. */}}
{{- define "lorafleet.completeValues" -}}
{{- $values := .Values -}}
{{- /* The former name of poolDefaults.serviceAccount. */ -}}
{{- with $values.workerServiceAccount -}}
{{- if not (kindIs "map" $values.poolDefaults) -}}{{- $_ := set $values "poolDefaults" dict -}}{{- end -}}
{{- $_ := set $values.poolDefaults "serviceAccount" (merge (dict) ($values.poolDefaults.serviceAccount | default dict) .) -}}
{{- end -}}
{{- range .Files.Get "files/defaults.json" | fromJsonArray -}}
{{- $at := $values -}}
{{- range initial .path -}}
{{- if not (kindIs "map" (get $at .)) -}}{{- $_ := set $at . dict -}}{{- end -}}
{{- $at = get $at . -}}
{{- end -}}
{{- $name := last .path -}}
{{- if or (not (hasKey $at $name)) (kindIs "invalid" (get $at $name)) -}}{{- $_ := set $at $name (deepCopy .value) -}}{{- end -}}
{{- end -}}
{{- if not (kindIs "map" $values.global) -}}{{- $_ := set $values "global" dict -}}{{- end -}}
{{- $_ := set $values "imagePullSecrets" (include "lorafleet.secretNames" $values.imagePullSecrets | fromJsonArray) -}}
{{- $_ := set $values "aliases" (include "lorafleet.listOf" (dict "items" $values.aliases "key" "name") | fromYamlArray) -}}
{{- $_ := set $values "pools" (include "lorafleet.listOf" (dict "items" $values.pools "key" "name") | fromYamlArray) -}}
{{- end }}

{{/* Names of Secrets that are given as names or as {name: ...}, as a JSON list. */}}
{{- define "lorafleet.secretNames" -}}
{{- $names := list -}}
{{- range . -}}{{- if kindIs "map" . }}{{ $names = append $names .name }}{{ else }}{{ $names = append $names . }}{{ end -}}{{- end -}}
{{- toJson $names -}}
{{- end }}

{{/* Items that are given as a map by name, or as a list, as a YAML list; a null of the map is left out.
(dict "items" .Values.pools "key" "name") */}}
{{- define "lorafleet.listOf" -}}
{{- $items := list -}}
{{- $key := .key -}}
{{- if kindIs "map" .items -}}
{{- range $name, $item := .items -}}
{{- if not (kindIs "invalid" $item) -}}{{- $items = append $items (merge (dict $key $name) $item) -}}{{- end -}}
{{- end -}}
{{- else -}}
{{- $items = .items -}}
{{- end -}}
{{- toYaml $items -}}
{{- end }}
